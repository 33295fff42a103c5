"""Small reference models, and the contract by which any `nn.Module` can hand over a plan.

Invariant: a model does not depend on ranks, meshes or data; what others need of it is data in its `ModelPlan`. This
package must not import `parallel`, `data` or `train`.
"""
