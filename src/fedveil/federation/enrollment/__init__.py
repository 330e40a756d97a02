"""How a federation comes to be: who founds it, joins it and moves; the keys and certificates that this takes."""
