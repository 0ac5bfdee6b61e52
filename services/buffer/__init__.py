"""The buffer: owns the life of every prompt of a run. The only tier that speaks to a Redis or Valkey server."""
