"""What `ringtile bench` measures, and how. Only the command line imports it."""
