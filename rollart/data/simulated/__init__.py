"""What lives inside workers when a run is simulated: devices, environments and rewards that only let time pass."""
