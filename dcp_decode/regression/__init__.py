"""The regression gate: is a new measurement slower than a committed one by more than a limit, beyond its noise?"""
