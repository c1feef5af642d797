"""SwitchSD inside engines that people already run: vLLM and transformers."""
