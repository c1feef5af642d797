"""Small networks that decide while tokens are drafted and verified, and their training with PPO."""
