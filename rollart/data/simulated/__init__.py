"""What stands in the workers of a simulated run: engines, environments, rewards, trainer, store, on modelled devices.

Everything here lives in virtual time (`rollart/virtual_time.py`) and is called as the real workers are, so that control
does not know. What this package leaves out: any decision, which is control's.
"""
