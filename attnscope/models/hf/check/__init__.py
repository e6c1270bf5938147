"""Does the seam give what the model itself computes?"""
