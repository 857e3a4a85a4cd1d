"""The measurements of `ringtile bench`. Only the command line imports this package."""
