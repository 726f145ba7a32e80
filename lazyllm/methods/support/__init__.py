"""What methods are made of: base classes, sessions, schedules, scores; and methods from packages and files."""
