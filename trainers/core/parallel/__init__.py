"""Work shared by several processes: gathering over ranks, the ring, and FSDP."""
