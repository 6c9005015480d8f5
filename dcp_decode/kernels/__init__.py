"""The three stages in CuTe DSL, for sm_90a, sm_100a and sm_103a. Only this package imports cutlass."""
