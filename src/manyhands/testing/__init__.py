"""A public test kit: clock (virtual time), wan (an emulated wide area network), tiny (models that fit a test)."""
