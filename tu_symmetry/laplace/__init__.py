"""Linearized Laplace: curvature, evidence, tangent linear model and predictive, with one precision per group."""
