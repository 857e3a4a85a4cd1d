"""The Hugging Face Trainer under context parallelism: `ringtile.enable` and what it rests on."""
