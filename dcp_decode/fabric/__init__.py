"""Symmetric memory among DCP ranks, behind one small interface (`memory.Fabric`)."""
