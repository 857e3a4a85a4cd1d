"""What the project is measured, judged and drawn with; no part of the package."""
