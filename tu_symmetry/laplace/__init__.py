"""Room: laplace."""
