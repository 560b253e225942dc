"""Runs a Program: row bytes in, row bytes out, with the same bits on every CPU (docs/arithmetic.md)."""
