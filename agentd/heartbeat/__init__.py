"""The program that says, five times a second, that this node lives."""
