"""How ranks talk: messages between two of them, agreement among all, and collectives along the sequence."""
