"""A federation of institutions: silo and coordinator as state machines over bytes, whatever carries them."""
