"""The HTTP endpoint that agents call: each session is an episode, and each request one of its turns."""
