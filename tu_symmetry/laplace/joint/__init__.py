"""The joint optimum of the tangent model's weights and the precisions: one optimizer, in four files."""
