"""Linearized Laplace in the space of outputs and observations, with structured priors: exact or by samples."""
