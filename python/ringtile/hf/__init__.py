"""The Hugging Face Trainer under context parallelism: `ringtile.enable`."""
