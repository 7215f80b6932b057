"""What can be said of `ansible/` without a machine."""
