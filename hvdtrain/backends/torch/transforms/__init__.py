"""What changes how a PyTorch model computes, each taken back when a run ends (`hvdtrain.core.protocols.Transform`)."""
