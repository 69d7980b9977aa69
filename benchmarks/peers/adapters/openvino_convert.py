"""`openvino_convert.py GGUF`: let OpenVINO GenAI read a .gguf file and save its own form beside it.

It reads the file itself as well, but then builds the same model anew at every start, which takes 1.7 s longer.
"""

from __future__ import annotations

import sys

import openvino_genai

if __name__ == "__main__":
    openvino_genai.LLMPipeline(sys.argv[1], "CPU", enable_save_ov_model=True)
