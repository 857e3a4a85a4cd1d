"""`make faults`: hostile trials by the thousand, counted. Every module here holds one campaign."""
