"""Small pure rules the coordinator consults: routing, synchronization, admission, filtering."""
