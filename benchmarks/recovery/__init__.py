"""What each death costs: see `__main__`."""
