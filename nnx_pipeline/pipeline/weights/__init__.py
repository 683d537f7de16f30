"""How weights are held during the loop: as stored, gathered, or with sharded gradients (ZeRO-1)."""
