"""Models as files for other programs: ONNX, torch.export and safetensors, each with a card that says what the model is."""

from equipoise.export.model_files import SUFFIXES, export_family, export_result

__all__ = ["SUFFIXES", "export_family", "export_result"]
