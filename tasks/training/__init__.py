"""The policy's update: packing, advantages, losses, trainer."""
