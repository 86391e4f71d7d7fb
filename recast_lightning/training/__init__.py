"""The LightningModule and the LightningDataModule, and what they need of Lightning."""
