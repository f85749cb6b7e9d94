"""What `execute` is made of: reading, strided moves, writing, journal, staging. Bytes only."""
