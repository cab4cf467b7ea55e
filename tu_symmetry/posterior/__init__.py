"""Posterior samples and their files, compact Gaussian posteriors, and adapters to samplers."""
