"""The policy's update: packing, advantages, losses, the trained model."""
