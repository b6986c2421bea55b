"""What `tools/golden.py` compares: cases, one module an area.

They use what users can call and nothing else, so that moving and renaming what stands behind it
leaves them as they are.
"""
