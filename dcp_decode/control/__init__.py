"""Control planes: who am I, all-gather, broadcast, barrier and the liveness of peers (`plane.ControlPlane`)."""
