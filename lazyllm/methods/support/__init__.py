"""What methods are made of: bases, sessions, schedules, scores; and methods of users."""
