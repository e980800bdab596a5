"""Model cards of elastic checkpoints, and their publication on the Hub."""
