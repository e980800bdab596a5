"""What objectives with a teacher share."""
