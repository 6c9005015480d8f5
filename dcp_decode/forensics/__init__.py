"""What a failed run leaves behind, in one archive, and what it says about the first cause.

rank process --black_box--> evidence of each rank --archive--> PATH.forensics.tar.gz --diagnosis--> first cause
"""
