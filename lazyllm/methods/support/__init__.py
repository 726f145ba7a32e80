"""What methods are made of: base classes, sessions, schedules, plug-ins."""
