"""What runs in the environment of a serving engine, beside this one's tests."""
