"""What the stages share."""
