"""Rollouts by ansible, played against virtual machines."""
