"""What a user types, and sees."""
