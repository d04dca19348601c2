"""A real process under load, killed at a random moment, reopened, and every block checked."""
