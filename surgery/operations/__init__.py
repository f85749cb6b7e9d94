"""The operations, one a file; `recipe` has the table of them and the syntax they are written in."""
