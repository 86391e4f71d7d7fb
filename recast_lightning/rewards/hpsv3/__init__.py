"""HPSv3, on Qwen2-VL."""
