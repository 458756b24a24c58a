"""Matrix products in tile registers (AMX)."""
