"""Trainings on images: torchvision, timm, segmentation-models, diffusers."""

import segmentation_models_pytorch as smp
import timm
import timm.data
import timm.loss
import timm.optim
import torch
import torchvision
from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel, UNet2DModel
from torch import nn
from torch.nn import functional as F


def _classified(model, size=64, classes=10, batch=4):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    images, labels = torch.randn(batch, 3, size, size), torch.randint(0, classes, (batch,))
    model.train()

    def step():
        optimizer.zero_grad()
        criterion(model(images), labels).backward()
        optimizer.step()

    return step, model, optimizer


def torchvision_resnet18():
    return _classified(torchvision.models.resnet18(num_classes=10))


def torchvision_regnet():
    return _classified(torchvision.models.regnet_y_400mf(num_classes=10))


def torchvision_mobilenet():
    return _classified(torchvision.models.mobilenet_v3_small(num_classes=10))


def torchvision_deeplab():
    model = torchvision.models.segmentation.deeplabv3_mobilenet_v3_large(
        weights=None, weights_backbone=None, num_classes=5
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    images, masks = torch.randn(2, 3, 64, 64), torch.randint(0, 5, (2, 64, 64))
    model.train()

    def step():
        optimizer.zero_grad()
        F.cross_entropy(model(images)["out"], masks, ignore_index=255).backward()
        optimizer.step()

    return step, model, optimizer


def torchvision_faster_rcnn():
    model = torchvision.models.detection.fasterrcnn_mobilenet_v3_large_320_fpn(
        weights=None, weights_backbone=None, num_classes=5
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9)
    images = [torch.rand(3, 128, 128), torch.rand(3, 96, 128)]
    targets = [
        {"boxes": torch.tensor([[10.0, 10.0, 60.0, 60.0]]), "labels": torch.tensor([1])},
        {"boxes": torch.tensor([[20.0, 20.0, 80.0, 70.0]]), "labels": torch.tensor([2])},
    ]
    model.train()

    def step():
        optimizer.zero_grad()
        sum(model(images, targets).values()).backward()
        optimizer.step()

    return step, model, optimizer


def timm_vit_with_drop_path():
    model = timm.create_model(
        "vit_tiny_patch16_224", num_classes=10, img_size=64, depth=3, drop_path_rate=0.1
    )
    return _classified(model)


def timm_convnext():
    return _classified(timm.create_model("convnext_atto", num_classes=10, drop_path_rate=0.1))


def timm_efficientnet_with_mixup():
    model = timm.create_model("efficientnet_b0", num_classes=10)
    optimizer = timm.optim.create_optimizer_v2(model, opt="adamw", lr=1e-3)
    mixup = timm.data.Mixup(mixup_alpha=0.2, num_classes=10)
    criterion = timm.loss.SoftTargetCrossEntropy()
    images, labels = torch.randn(4, 3, 64, 64), torch.randint(0, 10, (4,))
    model.train()

    def step():
        optimizer.zero_grad()
        mixed, targets = mixup(images.clone(), labels)
        criterion(model(mixed), targets).backward()
        optimizer.step()

    return step, model, optimizer


def segmentation_unet():
    model = smp.Unet("resnet18", encoder_weights=None, classes=1)
    criterion = smp.losses.DiceLoss(mode="binary")
    optimizer = torch.optim.Adam(model.parameters())
    images, masks = torch.randn(2, 3, 64, 64), torch.randint(0, 2, (2, 1, 64, 64)).float()
    model.train()

    def step():
        optimizer.zero_grad()
        criterion(model(images), masks).backward()
        optimizer.step()

    return step, model, optimizer


def diffusers_unet():
    model = UNet2DModel(
        sample_size=16,
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
    )
    scheduler = DDPMScheduler(num_train_timesteps=100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    images = torch.randn(4, 3, 16, 16)

    def step():
        noise = torch.randn_like(images)
        times = torch.randint(0, 100, (4,))
        noisy = scheduler.add_noise(images, noise, times)
        F.mse_loss(model(noisy, times).sample, noise).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, model, optimizer


def stable_diffusion_lora():
    from peft import LoraConfig

    unet = UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=8,
        norm_num_groups=8,
    )
    vae = AutoencoderKL(block_out_channels=(16,), norm_num_groups=8, latent_channels=4)
    for frozen in (unet, vae):
        frozen.requires_grad_(False)
    unet.add_adapter(LoraConfig(r=4, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
    scheduler = DDPMScheduler(num_train_timesteps=100)
    optimizer = torch.optim.AdamW(p for p in unet.parameters() if p.requires_grad)
    images, text = torch.randn(2, 3, 8, 8), torch.randn(2, 16, 32)

    def step():
        with torch.no_grad():
            latents = vae.encode(images).latent_dist.sample() * vae.config.scaling_factor
        noise, times = torch.randn_like(latents), torch.randint(0, 100, (2,))
        noisy = scheduler.add_noise(latents, noise, times)
        F.mse_loss(unet(noisy, times, text).sample, noise).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, unet, optimizer
